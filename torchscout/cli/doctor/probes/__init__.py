"""How facts are found out: by trying what a job will do. What they mean ``checks`` says."""
