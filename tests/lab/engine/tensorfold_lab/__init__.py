"""The lab's stand-in for the TensorFold engine: two real ranks, real HTTP, a scripted model."""
