"""Documents on disk -> one flat store of bytes -> the training windows of each shard."""
