"""The scheduler of one model's requests, and the cost model of its batches."""
