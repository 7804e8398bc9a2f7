"""The GPU tier: the CPU tier's subjects, cases and planted bugs once more, on CUDA tensors, over NCCL, gloo and the simulator.

``make gpu`` or ``gpu_suite/run.sh`` runs it, on one GPU within :data:`gpu_suite.plan.BUDGET_SECONDS`, and prints a table last: what ran
where, and what did not and why. Without a GPU it exits 5. ``--gpu-device cpu`` (``run.sh --cpu``) is the way to ask for the CPU instead:
the same tests over gloo and the simulator, with all that needs a GPU counted as not run.

The process world imports subjects by name, so that everything here is an attribute of a module.
"""
