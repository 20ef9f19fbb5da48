"""Every rule that a run has to obey, as rows of (condition, message, remedy); a table's own rows stand in the table.

tables    rules between tables, and what biases the gradient: checked when a configuration is read
ranks     the number of ranks: sizes that must divide
model     the model's config.json: `megarl doctor`, `plan`, `init` and the trainer ask
memory    the memory of a GPU: `megarl plan` asks

Rows read plain facts, so nothing here imports torch, Megatron or a model.
"""
