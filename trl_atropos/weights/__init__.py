"""How new weights reach the servers that sample from them, and how a run saves its weights and
resumes."""
