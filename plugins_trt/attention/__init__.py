"""`edged::Attention`: append, choose, select and attend, called once a layer."""
