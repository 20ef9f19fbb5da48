"""The needs of a run: memory and the arithmetic of batches, from the configuration alone.

No model is built. docs/plan.md has the formulas and measurements. In the order of the call:

    plan             configuration -> Estimate; bytes on the fullest GPUs
    layout           layers of each stage, parameters of each rank, batches of a step
    trainer_memory   bytes of a rank of the trainer: states, and tensors of a step's passes, module by module
    engine_memory    bytes of a GPU of the sampling engine
    table            prints a plan
"""
