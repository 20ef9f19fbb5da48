"""New weights on their way into SGLang servers.

payload         what a server reads a bucket from (`megarl.engines.buckets`)
line            a thread that sends one bucket while the next one is made
deadlines       how long a server may take for each step, and when it is late beside others
sender          one update of one server: pause, receive, verify, resume
ipc             transfer through memory that servers on this machine open
process_group   transfer by broadcast: the trainer's end of a gloo or NCCL group with servers
sources         several ranks that send a part each, in turns
folder          transfer through a shared folder, and the config-only folder of an FP8 model
"""
