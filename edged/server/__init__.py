"""The gRPC faces of the daemon: inference, control, health and reflection."""

import os

# Before gRPC is imported: what its core would print on its own is said by our errors, as log lines.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# A prompt is one text: threads for many would only take memory.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
