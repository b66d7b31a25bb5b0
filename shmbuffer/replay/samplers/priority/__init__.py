"""What a sampler knows of priorities: where they are, what is one, and the largest of them."""
