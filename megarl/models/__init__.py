"""Model families as data.

shapes      config.json -> shape of the model in Megatron's terms, and shape of the routes
hf_config   values of a config.json with the defaults of its family
names       Hugging Face tensors of each Megatron parameter, without torch
layouts     the cut of parameters for tensor parallelism
hf_folder   the files of a Hugging Face folder, without torch
hf_files    read and write Hugging Face checkpoints
fit         does a model fit the configuration?
"""
