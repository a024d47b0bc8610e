"""TensorRT engines: graph, builder, store."""
