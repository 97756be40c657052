"""How a job is: the status page of a job that runs, and the report of one that ran, are one."""
