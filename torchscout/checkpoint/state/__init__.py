"""What a rank's state is, and putting it back."""
