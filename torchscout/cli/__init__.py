"""The `scout` command and what it runs on this machine."""
