"""From records to numbers; nothing is drawn here."""
