"""Ways to make the step of an exported model fit a GPU: modes, recomputation, offload.

``umem choose MODEL.onnx`` shows the result.

    model_choice.py  has the table of ways, tries each, and returns plans as lists of actions for
                     another executor
    steady_step.py   repeats the step, as in training, and replays it
    step_problem.py  is the planning problem of the step
    applying.py      writes the step's events under a plan
    offloading.py    has the link, the times for planning offload, and the plan that offloads all

All times and moves are simulated.
"""
