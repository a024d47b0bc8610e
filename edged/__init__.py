"""A daemon that serves long-context language models over gRPC inside a static memory budget."""

__version__ = "0.1.0"
