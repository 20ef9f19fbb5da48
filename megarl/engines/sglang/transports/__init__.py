"""New weights on their way into SGLang servers.

Four transports behind one protocol:

tensor          base64 of the tensors over HTTP
broadcast       one broadcast through a gloo or NCCL group (``process_group``) to all servers
disk            a folder that the servers load, and the folder of a model without weights
ipc             memory of this machine that the servers open

Shared parts:

protocol        the protocol of a transport: ``stream`` makes the buckets, ``send`` sends one bucket
sender          the control requests of an update to one server: pause, verify, resume
proof           checks whether a server computes with the weights that the trainer sent
deadlines       time limits of each step, and when a server counts as late
threads         a thread that sends one bucket while the next one is made
"""
