"""New weights on their way into SGLang servers.

Four transports:

protocol        the protocol of a transport: ``stream`` makes the buckets, ``send`` sends a bucket; and the transport
                ``Tensors``, base64 over HTTP
broadcast       a broadcast through a gloo or NCCL group of all servers
folder          a folder for the servers to load
ipc             memory of the machine, opened by the servers

sender          control requests of an update to a server, with time limits: pause, verify, resume; threads of an update
"""
