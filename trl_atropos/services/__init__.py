"""The processes of a run: started, watched and stopped with it."""
