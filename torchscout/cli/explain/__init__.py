"""`scout explain`: explains a hang from dumps of the Flight Recorder."""
