"""Choosing what makes a program fit a GPU: it runs dry under each technique.

`technique` is a row of the table, `technique_rows` the table, and `child` a dry run under one, from
both sides. `choosing` orders what was tried, and `batch_sizes` looks for the largest batch that
fits, and halves sizes.
"""
