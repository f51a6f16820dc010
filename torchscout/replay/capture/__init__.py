"""One module call, captured and made repeatable."""
