"""Parts that several backends share and that have something to keep."""
