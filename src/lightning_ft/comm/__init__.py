"""The resilient group: an inner torch.distributed group that is broken, rebuilt and settled behind one face."""
