"""Record a run that died on a bad number, and replay its step.

A bundle (`bundle`) holds the batch, the keys and the state before the step that failed,
and the step's program (`recorded_program`), which reports for each of its equations
whether it made a NaN (`watched`). `examine` makes a bundle when a run dies; `replay`
runs it again on one device. A bundle is arrays, JSON and StableHLO: nothing in it is
ever unpickled or imported.
"""
