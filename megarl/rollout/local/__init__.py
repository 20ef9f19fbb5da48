"""The engine for one process: transformers on this device, without a server."""
