"""The software GPU without arithmetic: computes only small operations on known data.

Device memory is untouched address space. The contents of each range are known, guessed or unknown.
A call runs if it reads nothing unknown and touches little memory; any other call is skipped. The
observer is notified in both cases.
"""
