"""The software GPU without its arithmetic: what is small and known is computed, the rest left out.

Device memory is address space that nobody touches. Of each range it is known, guessed or unknown
what is in it; a call that reads nothing unknown and touches little memory runs, and any other is
left out. The observer is told the same in both cases.
"""
