"""The planner of Kusumoto et al., NeurIPS 2019, as the paper has it: its formula and its families.

    formula.py        is the cost model of the paper, to the letter
    families.py       has the two families of lower sets
    formula_plans.py  makes plans under the formula, and the plan that keeps everything
    formula_rules.py  has the rules of a step: what counts, and what a step of backward reads

Plans of the model ``saved`` are made elsewhere; both are searched by `umem.planner.search`.
"""
