"""What the daemon tells monitoring: Prometheus metrics, and traces where they are asked for."""
