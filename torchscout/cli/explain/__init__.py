"""`scout explain`: dumps of the Flight Recorder -> why a job hangs."""
