"""One knob: techniques that keep a training step to a budget, chosen from its trace, turned on."""
