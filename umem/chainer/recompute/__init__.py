"""Recomputation planned for a budget, on Chainer's own tape.

docs/design.md walks through a step, and lists the states of a pass.

    recompute.py      is the public `Recompute`: the budget, reports, pictures
    training.py       is a training run under one budget: its passes, and facts learned from them
    runner.py         follows Chainer's tap, and applies the policy of the current pass
    passes.py         is one forward and its backward, and carries all actions out
    pass_policies.py  is the interface of policies, and `FollowPlan`
    evict.py          is `Evict`, the policy without a plan
    pressure.py       follows a pass call by call, once it would not fit
    account.py        counts the bytes of a pass's arrays, and evicts some
    candidates.py     chooses what to evict next
    facts.py          has the facts about functions: may they run again, state, seconds, memory
    tape.py           is a call on the tape, whose arrays can be dropped and recomputed
    seen.py           is a graph that was seen: its tape, its facts, its plan; `TapeAction`
    graph_store.py    stores these graphs, finds the graph of a pass, and plans it
    observing.py      observes a whole pass: the arrays beside its graph, its peak
    late_plan.py      brings a pass to the state of a plan that is made at the end of its forward
    gradients.py      sums gradients in the order of a plain backward
    whole_graph.py    runs backward without a plan: restores all arrays first, or refuses
    offloaded.py      is the offload target of a training run, and a call's offloaded arrays

- One function handles memory that runs out, `Pass.retry_after_oom`: around a function, a step of
  backward and a recomputation. The policy makes room, and the call runs again.
- `Evict` under pressure drops and recomputes by itself, not by actions: it must make room between
  two functions that run again, depending on the bytes that the first has really freed.
- The order of gradient sums, nested and second backwards, cuts, other threads and copies before a
  change belong to runner and pass, not to a policy.
"""
