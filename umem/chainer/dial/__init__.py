"""One dial: what keeps a program's step to a budget, chosen from its trace and turned on."""
