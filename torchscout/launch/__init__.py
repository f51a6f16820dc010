"""`scout run`: attaches torchscout to a script that does not call it. `startup` is where a process begins."""
