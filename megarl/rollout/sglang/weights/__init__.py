"""New weights on their way into SGLang servers.

buckets         groups of tensors in one flat piece of memory
sender          one update of one server: pause, receive, verify, resume
ipc             transfer through memory that servers on this machine open
process_group   transfer by broadcast: the trainer's end of a gloo or NCCL group with one server
folder          transfer through a shared folder, and the config-only folder of an FP8 model
"""
