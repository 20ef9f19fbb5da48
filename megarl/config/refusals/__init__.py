"""Every rule on a run, as rows of (condition, message); a table's own rows are in the table. The texts are in
``megarl/config/refusals.toml``.

    tables    rules between tables, and settings that bias the gradient, checked when a configuration is read; rules on
              the number of ranks
    model     rules on the model's config.json and the memory of a GPU; asked by `megarl doctor`, `plan`, `init` and the
              trainer

Rows read plain facts, so no module imports torch, Megatron or a model.
"""
