"""What a run will need: memory, bytes moved, and the arithmetic of its batches, from the configuration alone.

No model is built. The formulas and what they were checked against: docs/plan.md. The way through:

    plan             puts it together: configuration -> Plan
    layout           layers of each stage, parameters of each rank, batches and pipeline bubble of a step
    trainer_memory   bytes of a rank of the trainer: states, and what the passes of a step hold, module by module
    engine_memory    bytes of a GPU of the sampling engine
    traffic          bytes that move between engine and trainer, and between ranks
    gpu_memory       bytes on the fullest GPUs
    table            prints a plan

May import config, core and models, and constants of megatron; nothing below imports it.
"""
