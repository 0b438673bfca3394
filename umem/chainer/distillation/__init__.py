"""Distillation: a small network learns from the output of a large one.

`DistillingUpdater` and `DistillingLoss` are for users.

    distilling_updater.py  is the Trainer's updater
    distilling_loss.py     is the loss: cross entropy with labels, and the distance to a teacher's
                           output
    teacher.py             runs a frozen network without a graph and without side effects
    labels.py              splits labels off a batch, and marks missing ones by -1
"""
