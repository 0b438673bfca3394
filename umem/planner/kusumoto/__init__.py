"""The planner of Kusumoto et al., NeurIPS 2019, as published: its formula and its families.

    formula.py        is the paper's cost model, unchanged
    families.py       has the two families of lower sets
    formula_plans.py  makes plans under the formula, and the plan that keeps everything
    formula_rules.py  has the rules of a step: the bytes that count, and the reads of backward

Plans of the model ``saved`` are made elsewhere; both are searched by `umem.planner.search`.
"""
