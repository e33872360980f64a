"""What runs next: the scheduler of one model's requests, and the cost of a batch."""
