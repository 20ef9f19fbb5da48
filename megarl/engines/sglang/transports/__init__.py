"""New weights on their way into SGLang servers.

Four transports behind a protocol:

tensor          base64 of the tensors over HTTP
broadcast       a broadcast through a gloo or NCCL group of all servers
folder          a folder for the servers to load
ipc             memory of the machine, opened by the servers

Shared parts:

protocol        the protocol of a transport: ``stream`` makes the buckets, ``send`` sends a bucket
sender          control requests of an update to a server: pause, verify, resume
threads         time limits of the steps; a line that sends a bucket during the making of the next bucket
"""
