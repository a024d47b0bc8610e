"""The gRPC faces: thin, no model knowledge."""
