"""What `trl-atropos check` looks at, a file for each: every one yields `finding.Finding`s and starts nothing."""
