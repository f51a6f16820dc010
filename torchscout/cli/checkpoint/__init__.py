"""`scout checkpoint`: inspects and manages the checkpoint folders of a job."""
