"""Stands where PyCUDA would: edged looks whether it is there before it takes a GPU for one that it can use."""
