"""What is shown when a run has ended: a table, a curve, answers before and after."""
