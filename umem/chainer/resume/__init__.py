"""Resumed runs: the saved state of a run, and how it is restored.

`Snapshot`, `save_run` and `resume_run` are for users, and ``umem run --resume`` adds a `Snapshot`
to a script's Trainer. `umem.snapshots` writes the files.

    snapshot_extension.py  is `Snapshot`, a trainer extension
    loop_snapshots.py      is `save_run` and `resume_run`, for a hand-written loop
    saver.py               saves one run: it copies while the run waits, and writes in the
                           background
    saver_of_ranks.py      saves one run of several ranks
    run_state.py           is the whole state of a run, by name
    collecting.py          has Chainer's serializers to and from arrays and JSON
    optimizer_extras.py    has the state of optimizers and links that Chainer does not save
    random_states.py       saves and restores random generators
    epoch_orders.py        remembers orders of an epoch that an iterator drew ahead
    rollback.py            restores the objects if a snapshot is refused

- Objects with state are saved through Chainer's protocol, a method ``serialize``, which `Collector`
  and `Distributor` implement in the two directions.
- The arrays of models and optimizers are written last, after everything else is loaded.
"""

from umem.chainer.resume.collecting import Collector, Distributor

__all__ = ["Collector", "Distributor"]
