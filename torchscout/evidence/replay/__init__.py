"""In-situ replay: selected work of training, repeated on equal input (paper, section 6)."""
