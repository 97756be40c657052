"""The exactly-once data layer: which samples of an epoch are owed, and a sampler that deals them to who is there."""
