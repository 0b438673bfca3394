"""Batches in parts, with one update and the gradient of the whole batch.

`accumulate` and `AccumulatingUpdater` are for users; chainer/at_setup.py turns it on for the
techniques of `umem.choosing`.

    accumulating.py     is `accumulate`
    updater.py          is the Trainer's updater
    batch_parts.py      computes a whole batch, and halves a part that does not fit
    update_group.py     combines several calls of update into one
    kept_gradients.py   holds the gradients between these calls
    whole_gradient.py   runs the parts, and adds up their gradients
    splitting.py        takes some samples from a batch
    loss_terms.py       splits a loss into terms, and lists the functions whose divisor is known
    loss_weight.py      reads ``weight=``, the user's divisor of other terms
    loss_shares.py      computes each part's share of the whole, term by term
    part_facts.py       reads a part's loss or refuses it, and has the rules by which parts add up
    part_comparison.py  compares parts with the whole, when a list of terms is new
    part_reports.py     combines the values that a loss function reports
    mixing.py           refuses functions whose result for a sample depends on others
"""
