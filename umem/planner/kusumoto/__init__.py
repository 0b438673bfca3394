"""The planner of Kusumoto et al., NeurIPS 2019, as the paper has it: its formula and its families.

Plans of the model ``saved`` are made elsewhere; both are searched by `umem.planner.search`.
"""
